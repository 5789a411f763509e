// Inputs and outputs lie in memory as float32.
alias Element = f32;
