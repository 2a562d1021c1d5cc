python3 - <<'EOF'
from pathlib import Path

notes = Path("notes.py")
text = notes.read_text()
text = text.replace("tags=[], links={}", "tags=None, links=None")
text = text.replace("self.tags = tags", "self.tags = list(tags or ())")
text = text.replace("self.links = links", "self.links = dict(links or {})")
notes.write_text(text)
EOF
