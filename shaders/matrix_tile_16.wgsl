// Matrix units that take tiles of 16x16: float16 operands, float32 sums.
alias MatrixLeft = coop_mat16x16<f16, A>;
alias MatrixRight = coop_mat16x16<f16, B>;
alias MatrixSum = coop_mat16x16<f32, C>;
const EDGE = 16u;
const TILE = 16u * 16u;
