"""What a reader of the pages can set, as HTML that also says everything where nothing can be set, as in print.

A function here makes the HTML, with every figure in it; a function of `book/_static/interactive.js`, where one is
needed, moves what is shown from one of these figures to another.
"""
