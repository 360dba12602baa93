"""Results as pages and figures."""
