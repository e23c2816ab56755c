"""What all HTML pages share: the document, the base style sheet, and axis ticks."""
