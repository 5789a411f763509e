// Inputs and outputs lie in memory as float16; all arithmetic and the states are float32.
enable f16;
alias Element = f16;
