"""The commands of `kvharbor`, one idea a file. They import what they need when they run."""
