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

`kv_pages_LKMxCH` is [layer, KV head, physical page, key or value, token, H]. The engine allocates
it contiguous, so that a page of one KV head is one block of 2 C H numbers; kernels take any strides
of the axes before H, as other engines store their caches:

    pool[layer, head, page]    | key 0 | key 1 | ... | key C-1 | value 0 | ... | value C-1 |

`landmarks_LMKH` is [layer, physical page, KV head, H]: the mean of the C keys of a page, written
when the page completes. The landmarks of all KV heads of a page lie side by side:

    landmarks[layer, page]     | head 0 | head 1 | ... | head K-1 |
"""

from __future__ import annotations


def page_shape(page_size: int, head_dim: int) -> tuple[int, int, int]:
    """Axes of one page of one KV head: (key or value, token, number)."""
    return 2, page_size, head_dim


def landmark_shape(num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Axes of the landmarks of one page: (KV head, number)."""
    return num_kv_heads, head_dim


def touched_pages(num_tokens: int, page_size: int) -> int:
    """The most pages that num_tokens consecutive tokens can lie in, wherever the first one lies."""
    return (num_tokens + page_size - 2) // page_size + 1
