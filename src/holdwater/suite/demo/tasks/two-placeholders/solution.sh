cat > mail.py <<'EOF'
"""Fills in the text of a mail."""

import re


def fill(text, values):
    """`text` with every `{{name}}` replaced by its value; an unknown name stays."""

    def value(match):
        return str(values.get(match[1], match[0]))

    return re.sub(r"{{\s*(.*?)\s*}}", value, text)
EOF
