"""The engine over HTTP, and the library that programs use."""
