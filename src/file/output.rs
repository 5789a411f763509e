//! Output files that are never half written.

use super::{NamedTensor, file_error, output_shape, write_to};
use crate::error::{Error, Result};
use crate::problem::{Operand, Outputs, Problem};
use std::collections::BTreeMap;
use std::fs::File;
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
        // Opened by hand: temporary files are private by default, and an output should be as readable as any other
        // file; and errors are then those of the system, without the temporary name, which means nothing to the user.
        tempfile::Builder::new()
            .prefix(".eda-")
            .make_in(&self.directory, |name| File::create_new(name))
            .map_err(|e| cannot_write(path, &e))
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
        let failed = |e: &std::io::Error| cannot_write(&self.path, e);
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

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    file_error(path, format!("cannot write: {error}"))
}
