for (const box of document.querySelectorAll(".code")) {
  const button = document.createElement("button");
  const code = box.querySelector("code");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy: " + box.dataset.what);
  button.setAttribute("aria-live", "polite");
  const copied = () => {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
  button.onclick = () => {
    const byHand = () => {
      getSelection().selectAllChildren(code);
      if (document.execCommand("copy")) copied();
    };
    if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).then(copied, byHand);
    else byHand();
  };
  box.prepend(button);
}
