"""What crosses a border: between layers, and between stages on a link."""
