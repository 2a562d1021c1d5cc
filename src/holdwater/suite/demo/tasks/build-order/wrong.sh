cat > build.py <<'EOF'
"""In which order packages are built."""


class CycleError(Exception):
    def __init__(self, cycle):
        super().__init__("packages need each other: " + " -> ".join(cycle))
        self.cycle = cycle


def order(needs):
    """All packages, each after what it needs; `needs` maps a package to the list of what it needs."""
    done = []

    def visit(package, path):
        if package in done:
            return
        if package in path:
            raise CycleError([*path, package])
        for needed in needs.get(package, []):
            visit(needed, [*path, package])
        done.append(package)

    for package in needs:
        visit(package, [])
    return done
EOF
