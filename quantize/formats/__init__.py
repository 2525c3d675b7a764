"""The formats that matrices are stored in. Imports numpy alone; a format may bring readers in the words of targets."""
