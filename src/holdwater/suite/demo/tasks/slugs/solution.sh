cat > slugs.py <<'EOF'
"""Names for URLs."""

import re
import unicodedata


def slug(title):
    """`title` in lower case letters, digits and single hyphens."""
    decomposed = unicodedata.normalize("NFKD", title.casefold())
    plain = "".join(c for c in decomposed if not unicodedata.combining(c))
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
EOF
