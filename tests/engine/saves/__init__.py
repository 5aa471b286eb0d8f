"""What leaves a trace: step by step, or by reference."""
