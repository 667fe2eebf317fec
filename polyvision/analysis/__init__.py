"""What is measured on networks, without Lightning: rank, similarity, cost, health, stability."""
