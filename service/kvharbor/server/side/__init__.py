"""The side socket, whose life a session is, and by which memory is handed out."""
