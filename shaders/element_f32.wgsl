// Inputs and outputs lie in memory as float32.
alias Element = f32;
alias Four = vec4<Element>;
