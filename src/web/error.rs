//! Errors as JavaScript sees them: `Error` objects with a `code`, and the messages of [`crate::Error`].

use super::input::set;
use crate::error::Error;
use crate::problem::FINITE;
use js_sys::Reflect;
use wasm_bindgen::JsValue;

/// Why a call failed: an error of this crate, or a value that some JavaScript threw (a callback, an abort).
pub(super) enum Failure {
    Eda(Error),
    Thrown(JsValue),
}

pub(super) type Result<T, E = Failure> = std::result::Result<T, E>;

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Eda(error)
    }
}

impl From<Failure> for JsValue {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Eda(error) => object(&error),
            Failure::Thrown(value) => value,
        }
    }
}

/// `code` of an error. The list is in `types.d.ts`.
fn code(error: &Error) -> &'static str {
    match error {
        Error::Tensor { expected, .. } if expected == FINITE => "non-finite",
        Error::Tensor { .. } => "tensor",
        Error::Unsupported { .. } => "unsupported",
        Error::NoAdapter(_) => "no-adapter",
        Error::Device(_) => "device",
        Error::DeviceLost(_) => "device-lost",
        Error::OutOfMemory { .. } => "out-of-memory",
        Error::SelfTest { .. } => "self-test",
        Error::File { .. } => "file",
    }
}

/// The error as a JavaScript object.
pub(super) fn object(error: &Error) -> JsValue {
    let object = js_sys::Error::new(&error.to_string());
    object.set_name("EdaError");
    set(&object, "code", code(error));
    if let Error::Tensor { tensor, .. } = error {
        set(&object, "tensor", tensor);
    }
    object.into()
}

/// What a JavaScript value that was thrown says.
pub(super) fn text(thrown: &JsValue) -> String {
    let message = Reflect::get(thrown, &"message".into()).ok();
    message
        .and_then(|m| m.as_string())
        .or_else(|| thrown.as_string())
        .unwrap_or_else(|| format!("{thrown:?}"))
}
