//! A progress bar for work that takes longer than a second, where someone is watching.

use indicatif::{ProgressBar, ProgressStyle};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Work shorter than this shows nothing.
const PATIENCE: Duration = Duration::from_secs(1);

/// A bar that appears by itself; it is cleared when dropped.
pub(crate) struct Progress {
    start: Instant,
    watched: bool,
    unit: &'static str,
    bar: OnceLock<ProgressBar>,
}

impl Progress {
    pub(crate) fn start() -> Self {
        Self::of("tokens")
    }

    /// A bar that counts something else.
    pub(crate) fn of(unit: &'static str) -> Self {
        Self {
            start: Instant::now(),
            watched: crate::watched(),
            unit,
            bar: OnceLock::new(),
        }
    }

    /// `done` of `total` are done.
    pub(crate) fn update(&self, done: usize, total: usize) {
        if !self.watched || self.start.elapsed() < PATIENCE {
            return;
        }
        let bar = self.bar.get_or_init(|| {
            let bar = ProgressBar::new(total as u64).with_elapsed(self.start.elapsed());
            let unit = self.unit;
            match ProgressStyle::with_template(&format!(
                "{{bar:40}} {{human_pos}}/{{human_len}} {unit}, {{eta}} left"
            )) {
                Ok(style) => bar.with_style(style),
                Err(_) => bar,
            }
        });
        bar.set_position(done as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = self.bar.get() {
            bar.finish_and_clear();
        }
    }
}

/// Does work that cannot say how far it is, beside a spinner.
pub(crate) fn spin<T>(message: &'static str, work: impl FnOnce() -> T) -> T {
    if !crate::watched() {
        return work();
    }
    std::thread::scope(|scope| {
        let (done, wait) = channel::<()>();
        scope.spawn(move || {
            if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let spinner = ProgressBar::new_spinner()
                    .with_message(message)
                    .with_elapsed(PATIENCE);
                spinner.enable_steady_tick(Duration::from_millis(100));
                // Ends when `done` is dropped, also by a panic in the work.
                let _ = wait.recv();
                spinner.finish_and_clear();
            }
        });
        let result = work();
        drop(done);
        result
    })
}
