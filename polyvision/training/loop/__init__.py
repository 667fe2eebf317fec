"""The training loop: Lightning module, optimizer, devices, when to save and to stop."""
