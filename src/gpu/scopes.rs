//! Error scopes in a browser, where what a scope caught is told later: each scope's answer is waited for in the
//! background, and the engine asks for the first error before it returns from a call.

use super::kernels::{Kernels, reported};
use crate::error::{Error, Result};
use futures::channel::oneshot;
use std::cell::RefCell;

/// What is known about one device.
struct Answers {
    device: wgpu::Device,
    /// Scopes whose answer has not come.
    open: usize,
    /// The first error since it was last asked for.
    error: Option<Error>,
    /// Told when `open` gets to 0.
    waiting: Vec<oneshot::Sender<()>>,
}

thread_local! {
    // WebGPU objects belong to the thread that made them. An entry goes when nothing is left to say.
    static ANSWERS: RefCell<Vec<Answers>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` on the entry of a device, made where there is none and removed where it says nothing.
fn with<T>(device: &wgpu::Device, f: impl FnOnce(&mut Answers) -> T) -> T {
    ANSWERS.with_borrow_mut(|all| {
        let at = all
            .iter()
            .position(|a| a.device == *device)
            .unwrap_or(all.len());
        if at == all.len() {
            all.push(Answers {
                device: device.clone(),
                open: 0,
                error: None,
                waiting: Vec::new(),
            });
        }
        let answers = &mut all[at];
        let result = f(answers);
        if answers.open == 0 && answers.error.is_none() {
            all.swap_remove(at);
        }
        result
    })
}

/// Runs `create` in error scopes whose answers [`settled`] gives.
pub(super) fn guarded<T>(
    device: &wgpu::Device,
    what: &str,
    bytes: u64,
    create: impl FnOnce() -> T,
) -> T {
    let validation = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let memory = device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let value = create();
    let (memory, validation) = (memory.pop(), validation.pop());
    with(device, |a| a.open += 1);
    let (device, what) = (device.clone(), what.to_owned());
    wasm_bindgen_futures::spawn_local(async move {
        let (memory, validation) = futures::join!(memory, validation);
        let error = memory
            .or(validation)
            .map(|error| reported(error, &what, bytes));
        with(&device, |a| {
            a.open -= 1;
            a.error = a.error.take().or(error);
            if a.open == 0 {
                for waiting in a.waiting.drain(..) {
                    // Whoever waited may have given up.
                    let _ = waiting.send(());
                }
            }
        });
    });
    value
}

/// Waits until every scope so far has answered; the first error among them, which is then forgotten.
pub(super) async fn settled(device: &wgpu::Device) -> Option<Error> {
    let pending = with(device, |a| {
        (a.open > 0).then(|| {
            let (sender, receiver) = oneshot::channel();
            a.waiting.push(sender);
            receiver
        })
    });
    if let Some(pending) = pending {
        // The sender is dropped only after it has been used.
        let _ = pending.await;
    }
    with(device, |a| a.error.take())
}

impl Kernels {
    /// In a browser: waits until it is known whether everything that was created so far on this device for kernels is
    /// right. Each error is told once.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Device`].
    pub async fn settled(&self) -> Result<()> {
        match settled(self.device()).await {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}
