"""Profiles from small tables, for the tests of schedules."""


def rows(table, width=64):
    """table: {k: [p5 per bin]}, or (p5, low) per bin; p1 is p5 - 0.1; None = too few tokens."""
    result = []
    for k, values in table.items():
        for b, value in enumerate(values):
            p5, low = value if isinstance(value, tuple) else (value, value)
            row = {"k": k, "bin": b, "start": width * b, "end": width * (b + 1)}
            row |= {"count": 3 if p5 is None else 500, "num_sequences": 9, "enough": p5 is not None}
            row |= dict.fromkeys(("mean", "p50", "share_above_0_999"), p5)
            for name, shift in (("p5", 0.0), ("p1", 0.1)):
                ends = [None if v is None else v - shift for v in (p5, low, p5)]
                row |= zip((name, f"{name}_low", f"{name}_high"), ends, strict=True)
            result.append(row)
    return result


def profile(table, page_size=16, width=64, halves=(), **more):
    """A profile of bins of `width` tokens; halves: two tables."""
    return {
        "format": "sparrow-profile-1",
        "model": "models/tiny",
        "page_size": page_size,
        "bin_tokens": width,
        "quantiles": [0.01, 0.05],
        "rows": rows(table, width),
        "versions": {"numpy": "2"},
        **({"halves": [{"rows": rows(half, width)} for half in halves]} if halves else {}),
        **more,
    }


# Bins 0 and 4 have too few tokens.
TABLE = {
    4: [None, 0.95, 0.80, 0.92, None, 0.10],
    8: [None, 0.99, 0.91, 0.95, None, 0.20],
    16: [None, 0.99, 0.97, 0.99, None, 0.30],
    "dense": [None, 0.99, 0.99, 0.99, None, 0.99],
}
