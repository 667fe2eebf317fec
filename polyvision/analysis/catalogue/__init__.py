"""The activations one by one: what each is, and whether one keeps the contract of all."""
