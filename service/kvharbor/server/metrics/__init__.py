"""What Prometheus scrapes, and the HTTP port."""
