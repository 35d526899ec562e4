"""How near reuse inside a prompt comes on texts of its own, and which repair is switched on for it."""
