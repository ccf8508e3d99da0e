"""What `kvharbor doctor` looks at, a topic a module: each yields its checks, and a check that fails stops no other."""
