python3 - <<'EOF'
from pathlib import Path

settings = Path("settings.py")
text = settings.read_text()
old = text[text.index("def merge") : text.index("def load")]
new = '''def merge(defaults, user):
    """`defaults` with the user's settings in their place."""
    merged = copy.deepcopy(defaults)
    for name, value in user.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict):
            below = merged.get(name)
            merged[name] = merge(below if isinstance(below, dict) else {}, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


'''
settings.write_text(text.replace(old, new).replace("import json", "import copy\nimport json"))
EOF
