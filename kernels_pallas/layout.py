"""How the paged cache lies in memory: the page table, a page, and the landmarks of a page.

A sequence owns physical pages of a pool that all sequences share. Its row of the page table names
them in order: token t lives in page page_table[b, t // C] at offset t % C. Physical page 0 is the
null page: writes of padding go there, and nothing reads it. With C = 4 and a row of 10 tokens:

    logical page       0             1             2
    page_table[b]      7             2             9
                       |             |             |
    tokens        0  1  2  3    4  5  6  7    8  9  .  .      offsets 2 and 3 hold no token yet

    physical page   0      1      2      3    ...    7      8      9
    pool          | null |      | 4..7 |      ...  | 0..3 |      | 8, 9 |

`kv_pages_LKM` is [layer, KV head, physical page, rows, lanes]. A page of one KV head is one block
of 2 C H numbers, C keys and then C values, so that one DMA copies it. The last two axes only say
how the block is stored (page_shape): in rows of 128 lanes, since a TPU pads shorter rows to 128.

    C = 4, H = 128: one token per row          C = 4, H = 64: two tokens per row
         lane 0 .............. 127                  lane 0 ..... 63  64 ..... 127
    row 0   | key 0            |               row 0   | key 0    | key 1    |
        1   | key 1            |                   1   | key 2    | key 3    |
        2   | key 2            |                   2   | value 0  | value 1  |
        3   | key 3            |                   3   | value 2  | value 3  |
        4   | value 0          |
        .   |  ...             |
        7   | value 3          |

`landmarks_LMKH` is [layer, physical page, rows, lanes]: the mean of the C keys of a page, written
when the page completes. The landmarks of all KV heads of a page lie side by side, so that one DMA
copies them (landmark_shape):

    landmarks[layer, page]    | head 0 | head 1 | ... | head K - 1 |      K H numbers
"""

from __future__ import annotations

import jax


def page_shape(page_size: int, head_dim: int) -> tuple[int, int]:
    """Rows and lanes in which one page of one KV head is stored: [2 C H / 128, 128].

    Rows of H numbers where heads of H do not fill rows of 128 lanes.
    """
    numbers = 2 * page_size * head_dim
    lanes = 128 if 128 % head_dim == 0 and numbers % 128 == 0 else head_dim
    return numbers // lanes, lanes


def landmark_shape(num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Rows and lanes in which the landmarks of one page are stored: [K H / 128, 128], or [K, H].

    With rows of 64 lanes XLA would copy the landmarks into another layout for every kernel.
    """
    numbers = num_kv_heads * head_dim
    whole = 128 % head_dim == 0 and numbers % 128 == 0
    return (numbers // 128, 128) if whole else (num_kv_heads, head_dim)


def logical_pages(kv_pages_LKM: jax.Array, head_dim: int) -> jax.Array:
    """The pool as [L, K, M, 2, C, H], however its pages are stored."""
    return kv_pages_LKM.reshape(*kv_pages_LKM.shape[:3], 2, -1, head_dim)


def touched_pages(num_tokens: int, page_size: int) -> int:
    """The most pages that num_tokens consecutive tokens can lie in, wherever the first one lies."""
    return (num_tokens + page_size - 2) // page_size + 1
