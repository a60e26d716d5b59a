"""Running servers in production: files for other programs, and an app for Ray Serve."""
