"""The engines of benchmarks, each asked once for everything that it is measured with."""
