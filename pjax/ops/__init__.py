"""The operators: FFNs that skip inactive neurons, mat-vec, norms, decode attention, the bandwidth probe."""

from pjax.ops.attention import decode_attention as decode_attention
from pjax.ops.low_rank import low_rank_mask as low_rank_mask
from pjax.ops.matvec import matvec as matvec
from pjax.ops.matvec import matvecs as matvecs
from pjax.ops.matvec import stream_sum as stream_sum
from pjax.ops.norm import norm as norm
from pjax.ops.packed import pack_ffn as pack_ffn
from pjax.ops.packed import pack_matrix as pack_matrix
from pjax.ops.packed import unpack_ffn as unpack_ffn
from pjax.ops.packed import unpack_matrix as unpack_matrix
from pjax.ops.sign import pack_signs as pack_signs
from pjax.ops.sign import sign_scores as sign_scores
from pjax.ops.sparse import dense_ffn as dense_ffn
from pjax.ops.sparse import sparse_ffn as sparse_ffn
from pjax.ops.sparse import sparse_ffn_counted as sparse_ffn_counted
