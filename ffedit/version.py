"""The version of ffedit, in one place: read by the build, the manifests and `ffedit --version`."""

__version__ = "0.1.0"
