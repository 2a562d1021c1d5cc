"""Images and containers of a run: image builds, the docker daemon, and the supply of images for sandboxes."""
