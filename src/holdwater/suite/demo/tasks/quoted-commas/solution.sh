cat > addresses.py <<'EOF'
"""Reads address lists: lines of fields, separated by commas."""


def fields(line):
    """The fields of a line."""
    found = [""]
    quoted = False
    position = 0
    while position < len(line):
        character = line[position]
        if character == '"' and quoted and line[position + 1 : position + 2] == '"':
            found[-1] += '"'
            position += 1
        elif character == '"':
            quoted = not quoted
        elif character == "," and not quoted:
            found.append("")
        else:
            found[-1] += character
        position += 1
    return found


def addresses(text):
    """A list of fields for each line that is not blank."""
    return [fields(line) for line in text.splitlines() if line.strip()]
EOF
