"""``splitinfer bench --mode compare``: one table for somebody who has the machines and asks what they are worth.

work     what is measured, how long it will take, and what is left out
judge    whether answers are right
run      opens one system after the other, and measures
page     the table, and the page to share
"""
