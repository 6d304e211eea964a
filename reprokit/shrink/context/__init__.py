"""The context: the smallest failing piece of the user's model, with ordinary inputs, beside the minimum.

A minimum alone (`softmax` of nothing but `-inf`) reads as documented behaviour. The context shows how the bad operand
came about: the calls of the module where the failure was born, grown upstream until what they are given is ordinary,
then made small by the same oracle while its modules stay modules. ``reprokit.render.module`` prints it.
"""
