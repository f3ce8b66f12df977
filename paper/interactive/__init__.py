"""The interactive parts of the pages, as HTML that also says everything without interaction, as in print.

A function here makes the HTML, with every figure in it. Where needed, a function of `book/_static/interactive.js`
switches from one of these figures to another.
"""
