"""What peers say to each other, without any I/O: frames (messages to and from bytes) and the link's state machine."""
