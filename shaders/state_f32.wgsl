// States lie in memory as float32.
alias StateElement = f32;
