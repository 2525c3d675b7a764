"""The storage formats of matrices. Imports numpy alone; a format may name kernel readers, resolved by each target."""
