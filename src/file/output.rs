//! Output files that are never half written.

use super::{NamedTensor, file_error, output_shape, write_to};
use crate::error::Result;
use crate::problem::{Operand, Outputs, Problem};
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// An output file in the making: [`OutputFile::finish`] writes a temporary file in the target's directory,
/// which takes the target's name once it is complete. Until then an existing target is as it was, and a
/// program that is interrupted while it computes leaves nothing behind.
#[derive(Debug)]
pub struct OutputFile {
    path: PathBuf,
    directory: PathBuf,
}

impl OutputFile {
    /// Tries out a temporary file, so that a directory that cannot be written to shows before any work.
    ///
    /// # Errors
    /// [`crate::Error::File`] where the directory cannot be written to, or `path` is there and is read-only or not a
    /// regular file (renaming over `/dev/null` would replace it).
    pub fn create(path: &Path) -> Result<Self> {
        // Through a link, its target is what is replaced.
        let target = match std::fs::canonicalize(path) {
            Ok(target) if target.metadata().is_ok_and(|m| m.is_file()) => {
                if target.metadata().is_ok_and(|m| m.permissions().readonly()) {
                    return Err(file_error(
                        path,
                        "cannot write: expected a writable file, found a read-only one",
                    ));
                }
                target
            }
            Ok(_) => {
                return Err(file_error(
                    path,
                    "cannot write: expected a regular file or a new name, found something else",
                ));
            }
            // A link to nothing, or to what has no path (`/dev/stdout` where that is a pipe): renaming would replace the
            // link itself.
            Err(_) if path.symlink_metadata().is_ok() => {
                return Err(file_error(
                    path,
                    "cannot write: expected a regular file or a new name, found a link that leads to none",
                ));
            }
            Err(_) => path.to_owned(),
        };
        let directory = match target.parent() {
            Some(directory) if directory != Path::new("") => directory,
            _ => Path::new("."),
        };
        if target.file_name().is_none() {
            return Err(file_error(
                path,
                "cannot write: expected the name of a file",
            ));
        }
        let output = Self {
            directory: directory.to_owned(),
            path: target,
        };
        drop(output.temporary(path)?);
        Ok(output)
    }

    /// A temporary file beside the target; messages name `path`.
    fn temporary(&self, path: &Path) -> Result<tempfile::NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".eda-");
        // Temporary files are private by default; an output should be as readable as any other file.
        #[cfg(unix)]
        let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o666);
        #[cfg(unix)]
        builder.permissions(permissions);
        builder
            .tempfile_in(&self.directory)
            .map_err(|e| file_error(path, format!("cannot write: {}", reason(&e))))
    }

    /// Writes `o` and `final_state` with the given metadata and gives the file its name.
    ///
    /// # Errors
    /// [`crate::Error::File`]; the target is then as it was.
    pub fn finish(
        self,
        problem: &Problem,
        outputs: &Outputs,
        metadata: &BTreeMap<String, String>,
    ) -> Result<()> {
        let tensors = [
            NamedTensor {
                name: "o",
                shape: output_shape(problem),
                values: &outputs.o,
            },
            NamedTensor {
                name: "final_state",
                shape: problem.shape(Operand::InitialState),
                values: &outputs.final_state,
            },
        ];
        self.finish_with(|sink| write_to(sink, &tensors, metadata))
    }

    /// Writes what `write` writes and gives the file its name.
    ///
    /// # Errors
    /// [`crate::Error::File`]; the target is then as it was.
    pub fn finish_with(
        self,
        write: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
    ) -> Result<()> {
        let failed =
            |e: &std::io::Error| file_error(&self.path, format!("cannot write: {}", reason(e)));
        let temporary = self.temporary(&self.path)?;
        let mut sink = BufWriter::new(temporary.as_file());
        write(&mut sink)
            .and_then(|()| sink.flush())
            .and_then(|()| temporary.as_file().sync_all())
            .map_err(|e| failed(&e))?;
        drop(sink);
        match temporary.persist(&self.path) {
            Ok(_) => Ok(()),
            Err(e) => Err(failed(&e.error)),
        }
    }
}

/// An I/O error without the temporary file's name, which means nothing to the user.
fn reason(error: &std::io::Error) -> String {
    let mut code = error.raw_os_error();
    let mut inner = error
        .get_ref()
        .map(|e| e as &(dyn std::error::Error + 'static));
    while let (None, Some(e)) = (code, inner) {
        code = e
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::raw_os_error);
        inner = e.source();
    }
    match code {
        Some(code) => std::io::Error::from_raw_os_error(code).to_string(),
        None => error.kind().to_string(),
    }
}
