"""What ran: the recorder that writes events, the figures computed from them, progress and the report.

Reads and writes run directories; imports no torch.
"""
