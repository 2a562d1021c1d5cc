"""In which order packages are built."""


class CycleError(Exception):
    def __init__(self, cycle):
        super().__init__("packages need each other: " + " -> ".join(cycle))
        self.cycle = cycle


def order(needs):
    """All packages, each after what it needs; `needs` maps a package to the list of what it needs."""
    done = []

    def visit(package):
        if package in done:
            return
        for needed in needs.get(package, []):
            visit(needed)
        done.append(package)

    for package in needs:
        visit(package)
    return done
