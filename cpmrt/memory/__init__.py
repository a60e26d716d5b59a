"""Memory planned before anything is allocated, and the one allocation that follows the plan."""
