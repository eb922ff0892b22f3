"""Flax nnx blocks shared by the model families. They know no Hugging Face name and no request.

Dimension letters, here and everywhere: `T` query tokens · `B` rows · `S` KV length · `D` hidden ·
`N` query heads · `K` KV heads · `G` = N/K · `H` head_dim · `F` intermediate · `V` vocabulary ·
`L` layers · `P` pages · `M` pages per row · `C` KV groups · weights `[O, I]` (out, in).
"""
