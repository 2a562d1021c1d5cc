cat > backup.sh <<'EOF'
#!/bin/sh
# Copies the text files of a directory: backup.sh SOURCE TARGET

if [ ! -d "$1" ]; then
    echo "no such directory: $1" >&2
    exit 2
fi
mkdir -p -- "$2" || exit 1
count=0
for file in "$1"/*.txt; do
    [ -f "$file" ] || continue
    cp -- "$file" "$2"/ || exit 1
    count=$((count + 1))
done
echo "copied: $count"
EOF
