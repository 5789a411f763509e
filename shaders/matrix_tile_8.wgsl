// Matrix units that take tiles of 8x8: float16 operands, float32 sums.
alias MatrixLeft = coop_mat8x8<f16, A>;
alias MatrixRight = coop_mat8x8<f16, B>;
alias MatrixSum = coop_mat8x8<f32, C>;
const EDGE = 8u;
const TILE = 8u * 8u;
