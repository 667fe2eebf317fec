"""What activations are made of: coefficients, formulas, arithmetic."""
