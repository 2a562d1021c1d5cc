cat > addresses.py <<'EOF'
"""Reads address lists: lines of fields, separated by commas."""


def fields(line):
    """The fields of a line."""
    found = [""]
    quoted = False
    for character in line:
        if character == '"':
            quoted = not quoted
        elif character == "," and not quoted:
            found.append("")
        else:
            found[-1] += character
    return found


def addresses(text):
    """A list of fields for each line that is not blank."""
    return [fields(line) for line in text.splitlines() if line.strip()]
EOF
