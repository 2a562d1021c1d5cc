python3 - <<'EOF'
from pathlib import Path

convert = Path("convert.py")
text = convert.read_text()
text = text.replace("type=bool", "type=switch")
text = text.replace('action="store_const", const=1, default=0', 'action="count", default=0')
text = text.replace('"--scale", type=int', '"--scale", type=float')
text = text.replace('"--tag", default=[]', '"--tag", action="append", default=[]')
text = text.replace(
    "def options",
    '''def switch(word):
    """What a word means for an option that is on or off."""
    if word.lower() in ("yes", "true", "on", "1"):
        return True
    if word.lower() in ("no", "false", "off", "0"):
        return False
    raise argparse.ArgumentTypeError(f"neither yes nor no: {word}")


def options''',
)
convert.write_text(text)
EOF
