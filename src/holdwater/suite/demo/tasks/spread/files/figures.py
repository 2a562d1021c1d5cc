"""Figures of a series of measurements."""


def summary(values):
    """Count, mean, spread (population standard deviation) and largest of `values`; no values is an error."""
    count = sum(1 for _ in values)
    if not count:
        raise ValueError("no values")
    mean = sum(values) / count
    spread = (sum((value - mean) ** 2 for value in values) / count) ** 0.5
    return {"count": count, "mean": mean, "spread": spread, "largest": max(values, default=mean)}


def from_file(path):
    with open(path) as lines:
        return summary(float(line) for line in lines if line.strip())
