cat > cache.py <<'EOF'
"""A cache that forgets what was not used for the longest time."""


class Cache:
    def __init__(self, size):
        self.size = size
        self.entries = {}

    def put(self, key, value):
        self.entries.pop(key, None)
        while len(self.entries) >= self.size:
            del self.entries[next(iter(self.entries))]
        self.entries[key] = value

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        value = self.entries[key] = self.entries.pop(key)
        return value

    def peek(self, key, default=None):
        return self.entries.get(key, default)

    def __len__(self):
        return len(self.entries)
EOF
