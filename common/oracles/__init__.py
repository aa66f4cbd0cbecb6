"""Float64 numpy versions of every formula, which references and kernels are tested against."""
